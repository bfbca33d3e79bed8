"""From a trained model to W8A8 and W4A8: rotation, the table of what becomes what, calibration."""
