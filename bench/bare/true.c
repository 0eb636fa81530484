/* The cheapest program: what an exec costs beyond it is the exec itself. */
int main(void)
{
	return 0;
}
