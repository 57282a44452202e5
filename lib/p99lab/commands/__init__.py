"""One module a command: it parses, calls one function, prints."""
