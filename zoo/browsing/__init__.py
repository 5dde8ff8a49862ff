"""Every checkpoint on one page that needs no server: `rows` says what is known of them, `measured` how fast networks are, `page` writes it.

`zoo browse` opens the page, and the documentation has the same one. It needs no torch.
"""
