"""Places arrays on a mesh of devices: axes, shardings, collectives and parameter trees."""
