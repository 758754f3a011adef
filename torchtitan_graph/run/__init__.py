"""What belongs to a run as a whole and outlives its processes: the lock, the status and the failures in its folder."""
