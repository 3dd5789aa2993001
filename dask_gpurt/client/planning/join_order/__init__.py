"""Join tables by their sizes, and not in the order in which a program names them.

Programs join large tables first and small ones later, or tables that share a nation before those that share
an order, and so move and multiply rows that later joins leave out. Here inner joins by columns whose rows are
only joined again are taken together with all that is done row by row in between. The tables are joined in the
order in which the fewest bytes are joined and moved, also small ones with each other first. Columns that have
to be equal because of joins, or of a condition ``a == b`` later on, are keys as soon as both are there.

The flow of a plan:

1. :mod:`.rule` makes joins by columns of those that look rows up by an index;
2. :mod:`.graph` finds joins whose rows are only joined again, and describes them without an order: tables,
   keys, conditions, and the columns of the result;
3. :mod:`.costs` says how many rows and values tables have, by the footers of their files, and finds the order
   that costs least, by dynamic programming over sets of tables;
4. :mod:`.rule` decides whether that is worth it, and says so, and :mod:`.graph` makes a plan of it.

What it does not reason about
    Joins of other kinds, of two indexes, or by floats; what happens to the result of such joins, which is a
    table for the others. More than eight tables: those that are joined first stay together.
Why the result is the same
    Inner joins find all combinations of rows for which keys are equal, or both null, in any order. A
    condition ``a == b`` is checked as well, since null is not equal to null. Keys have one dtype on both
    sides, in which equal values are the same. No result may depend on how rows are divided or in which order
    they are joined (:mod:`~.rules.dependence`), and tasks check on which dtypes of files that relies.
    ``tests/unit/client/planning/test_join_order.py`` compares random trees of joins.
The figure
    See ``docs/decisions/planning.md``.
"""
