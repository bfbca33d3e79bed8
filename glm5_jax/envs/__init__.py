"""Where policies act and are judged: sandboxes, tasks and their verifiers."""
