/* Makes system calls by number and prints what the kernel said of each.
 *
 *   probe call ENTRY:NUMBER:ARG:ARG:ARG:ARG:ARG:ARG ...   one line each: errno, 0, or "signal N"
 *
 * ENTRY: w is the 64-bit one; n is i386's (int 0x80), which the kernel takes from a 64-bit
 * program too; x is x32's, the 64-bit one with bit 30 in the number. Numbers are hexadecimal.
 * Every call is made by a child, because a profile may kill. No argument is a pointer that
 * exists and no descriptor is open, so nothing happens but the filter's decision.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long word;

static long wide(word number, const word *arg)
{
	long result;
	register word r10 __asm__("r10") = arg[3];
	register word r8 __asm__("r8") = arg[4];
	register word r9 __asm__("r9") = arg[5];

	__asm__ volatile("syscall" : "=a"(result)
		: "a"(number), "D"(arg[0]), "S"(arg[1]), "d"(arg[2]), "r"(r10), "r"(r8), "r"(r9)
		: "rcx", "r11", "memory");
	return result;
}

static long narrow(word number, const word *arg)
{
	word all[7];
	long result;

	memcpy(all, arg, 6 * sizeof(word));
	all[6] = number;
	/* rbp is the sixth argument, rbx the first; the rest is loaded through rax. */
	__asm__ volatile(
		"push %%rbx\n\tpush %%rbp\n\t"
		"mov 0(%%rax), %%rbx\n\tmov 8(%%rax), %%rcx\n\tmov 16(%%rax), %%rdx\n\t"
		"mov 24(%%rax), %%rsi\n\tmov 32(%%rax), %%rdi\n\tmov 40(%%rax), %%rbp\n\t"
		"mov 48(%%rax), %%rax\n\tint $0x80\n\t"
		"pop %%rbp\n\tpop %%rbx"
		: "=a"(result) : "a"(all)
		: "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
	return (int)result;
}

static int call(const char *text)
{
	word number, arg[6];
	char entry;
	long result;

	if (sscanf(text, "%c:%lx:%lx:%lx:%lx:%lx:%lx:%lx", &entry, &number, arg, arg + 1, arg + 2,
		   arg + 3, arg + 4, arg + 5) != 8)
		return 255;
	if (entry == 'x')
		number |= 0x40000000;
	result = entry == 'n' ? narrow(number, arg) : wide(number, arg);
	return result < 0 ? (int)-result : 0;
}

int main(int argc, char **argv)
{
	for (int i = 2; i < argc; i++) {
		int status;
		pid_t child = fork();

		if (child == 0)
			_exit(call(argv[i]));
		if (child < 0 || waitpid(child, &status, 0) != child)
			return 1;
		if (WIFSIGNALED(status))
			printf("signal %d\n", WTERMSIG(status));
		else
			printf("%d\n", WEXITSTATUS(status));
	}
	return 0;
}
