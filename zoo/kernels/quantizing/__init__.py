"""Networks in int8: calibrated on a caller's images, compared with float32 on others, and used where the certificate holds."""
