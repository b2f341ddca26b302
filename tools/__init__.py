"""Programs for the repository itself: releases, pages and soaks. No wheel has them."""
