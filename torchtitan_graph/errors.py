"""The error that says what its reader has to change."""


class UserError(ValueError):
    """What somebody asked for can't be done: the message says what, what is legal, and what to do instead.

    It is shown as that message alone. Every other exception is a fault, ours or of code that we call, and keeps its
    traceback.
    """
