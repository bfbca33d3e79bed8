"""Where agents act: sandboxes, tasks and what they are scored by."""
