"""One file per verb: a frozen Request, and run(request) -> Report. Journeys never print."""
