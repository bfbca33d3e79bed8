"""Programs of a pod, compiled offline: how they are lowered, read and reported."""
