"""Runs programs on machines: processes, placement, HTTP servers, files and configs as flags."""
