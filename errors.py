"""The one error type that users see."""


class HooklineError(ValueError):
    """A problem the user can mend: one line that names the file, layer or input, and the reason."""
