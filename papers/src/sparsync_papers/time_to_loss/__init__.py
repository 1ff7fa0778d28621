"""A study of which training method reaches a loss first, based on measured loss curves.

The library itself compares only seconds per step (``sparsync.cost``), because these can be checked
by measurements on any machine.  The number of steps that a method needs depends on the model, the
data and the length of the run. This study fits it to curves of models with 0.1 to 8.4 M parameters;
the fit does not hold for other models.

    =================  =======================================================================
    ``steps_to_loss``  a method's number of steps relative to dense: the fit, and its error
    ``methods``        the seconds per step of whole methods, and the first to reach a loss
    ``command``        ``sparsync time-to-loss``
    =================  =======================================================================
"""
