"""Gives access to parts of jax that have no public name yet."""

from jax._src import distributed


def coordinator_host() -> str:
    """Returns the host by which the processes of the pod reach the first one; localhost without a pod."""
    address = distributed.global_state.coordinator_address or "localhost:0"
    return address.rpartition(":")[0].strip("[]")
