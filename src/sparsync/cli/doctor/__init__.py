"""``sparsync doctor``: facts about the ranks, checks on these facts, and the page that shows both."""
