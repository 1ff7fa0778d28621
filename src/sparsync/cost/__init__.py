"""The cost model: a machine's times, predictions and plans, and calibration on the links of a job."""
