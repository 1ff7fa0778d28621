"""Write the site's pages on algorithms, schemes, rooms and the API as Markdown, from the code itself.

No algorithm's page is written by hand. ``docs/hooks.py`` adds the generated pages when the site is built.
"""
