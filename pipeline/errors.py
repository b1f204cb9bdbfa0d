"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """Bad input, told in one sentence: the key, its value and what would be right. Shown without a traceback."""
