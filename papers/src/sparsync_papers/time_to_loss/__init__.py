"""A study: the training method that reaches a loss soonest, by a fit of steps to measured curves.

The library compares seconds per step (``sparsync.cost``), which its own measurements on any machine
can check.  How many steps a method needs depends on the model, the data and the length of the run;
here it is fitted to curves of models of 0.1 to 8.4 M parameters, and does not decide anything for others.

    ========== =========================================================================
    ``steps``   how many times the steps of dense a method needs: the fit, and its error
    ``methods`` seconds per step of whole methods, and the soonest at a loss
    ``command`` ``sparsync time-to-loss``
    ========== =========================================================================
"""
