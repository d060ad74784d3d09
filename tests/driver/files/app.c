/* The library that only a test's image has. */
int app(unsigned unused)
{
	(void)unused;
	return 7;
}
