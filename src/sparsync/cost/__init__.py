"""The cost model: a machine, predictions and plans, and calibration on the job's own links and ranks."""
