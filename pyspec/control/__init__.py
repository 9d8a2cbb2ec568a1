"""Who decides, from measured time, how much is drafted."""

from .base import Controller

__all__ = ["Controller"]
