"""Run fused tasks as programs of operations on columns, without the frames of their library in between.

A program is the graph of a fused task: a chain of selections, comparisons, products, filters. Between two of
its nodes, columns are passed with their dtype, and with the *domain* that identifies their rows. That two
columns are of one domain replaces the alignment of their indexes, and an index is only made where a frame
leaves the program. A node that is not known, or whose dtypes are not certain to be treated as the library
treats them, runs through the library, with its frames.

Decisions and their figures: ``docs/decisions/programs.md``.
"""

from dask_gpurt.frames.programs.interpreter import Interpreter, ProgramError

__all__ = ["Interpreter", "ProgramError"]
