"""``graphsafe bench``: where every figure of this project comes from.

=================  ============================================================
``cases``          what is measured; ``presets`` lists cases by name
``workloads``      a case made real: operands, body, oracle; ``steps`` trains
``modes``          the arms of a case: four modes and the controls beside them
``checks``         right before fast: fp64, graph against eager, padding
``timing``         the protocol of a time
``counts``         launches and bytes
``figures``        what follows from the times; ``regressions`` compares runs
``environment``    what the figures depend on
``run``            the loop, with progress, interruption and resume
``report``         tables and JSON; ``html`` and ``plots`` the page
=================  ============================================================
"""
