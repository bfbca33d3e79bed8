"""Dress rehearsal of a run: the real commands of a launcher, on emulated hosts, with a small model."""

# Environment variable with the path of the file that `substitution.Rehearsal` writes; unset: a real run.
VARIABLE = "GLM5_REHEARSAL"
# That with the path of the file by which the stand-in for srun finds the hosts.
HOSTS_FILE = "GLM5_REHEARSAL_HOSTS"
