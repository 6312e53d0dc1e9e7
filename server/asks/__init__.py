"""Wire types → `Ask`: what a body means, checked and complete, before the engine hears of it."""
