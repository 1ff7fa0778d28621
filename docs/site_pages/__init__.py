"""What the site's pages are made of: facts that the code and the README know, as Markdown.

No page of an algorithm is written by hand.  ``docs/hooks.py`` adds these pages when the site is built.
"""
