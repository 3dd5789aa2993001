"""Explain the plan of a computation before it runs, and where its time went after it ran.

:mod:`.plan` describes what is going to be done, :mod:`.run` adds what was measured and what to change.
"""
