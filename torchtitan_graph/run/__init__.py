"""State of a run that outlives its processes: the lock, the status and the failures in its folder."""
