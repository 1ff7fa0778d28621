"""Write the pages of the site that state facts of the code and its tables, as Markdown.

No page of an algorithm is written by hand.  ``docs/hooks.py`` adds these pages when the site is built.
"""
