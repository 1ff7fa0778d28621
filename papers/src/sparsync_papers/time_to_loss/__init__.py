"""A study: which training method reaches a loss first, from a fit of steps to measured curves.

The library compares seconds per step (``sparsync.cost``), which its own measurements on any machine
can check.  The number of steps that a method needs depends on the model, the data and the length of
the run. This study fits it to curves of models with 0.1 to 8.4 M parameters; the fit does not hold
for other models.

    =================  =======================================================================
    ``steps_to_loss``  the steps of a method over those of dense: the fit, and its error
    ``methods``        the seconds per step of whole methods, and the first to reach a loss
    ``command``        ``sparsync time-to-loss``
    =================  =======================================================================
"""
