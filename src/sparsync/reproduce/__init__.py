"""Tables and figures of the papers, made anew: ``sparsync reproduce NAME``.

::

    Artifact.run(Settings) --> Outcome(rows, comparisons, settings, differs, panels)
                                  |
        report: console, CSV, JSON, PNG       page: one HTML page of all

A new one: a module with an ``Artifact`` and a row in ``catalogue``.
"""
