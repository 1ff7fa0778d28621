"""``sparsync doctor``: the facts of the ranks, the judgement on them, and the page that shows both."""
