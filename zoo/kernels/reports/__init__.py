"""What `why` prints, what a plan is, and the bar that shows how far tuning is."""
