"""The server: public API, router, scheduler, supervision of the workers. It touches no tensor."""

__version__ = "0.1.0"
