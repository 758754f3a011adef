"""Plan a run before it is paid for."""
