"""``neo bench``: the engine in this process, with the worker processes of ``neo serve``."""
