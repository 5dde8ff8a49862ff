"""A class for every pixel: networks that end in a map as large as the image."""
