"""Who decides, from measured time, how much is drafted, and on how many threads."""

from .auto import AutoController
from .base import Controller
from .idle import IdleCpus
from .threads import ThreadGovernor

__all__ = ["AutoController", "Controller", "IdleCpus", "ThreadGovernor"]
