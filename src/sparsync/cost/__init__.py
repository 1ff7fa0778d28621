"""The cost model: a machine's times, predictions and plans, and calibration on a job's own links."""
