"""Programs that start runs: on this machine, on pods and through schedulers, and the compilers for pods."""
