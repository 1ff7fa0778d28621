"""Model of a machine, predictions and plans; calibration on the job's own links and ranks."""
