"""Drafters: how a draft is made. ``base`` has the contract, ``registry`` the names, one file a method."""

from __future__ import annotations

from .base import Drafter, Plan
from .registry import get, names, register

__all__ = ["Drafter", "Plan", "get", "names", "register"]
