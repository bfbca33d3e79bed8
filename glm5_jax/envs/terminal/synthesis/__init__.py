"""Synthesises terminal tasks: templates, models that write tasks in rounds, and the validator of both.

Templates (`templates`) make tasks from a seed, without a model. A builder (`builder`) lets a `Writer` make a task of a
draft (`drafts`) or of a page (`pages`), and returns the validator's report to it until all checks pass. The validator
(`validator`) runs the checks V01 to V12 without a model, and V13 and V14 with one (GLM-5 4.2.2).
"""
