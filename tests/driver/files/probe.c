/* Looks for a library as programs do, in whatever userland it is run.
 *
 *   probe SONAME [FUNCTION]
 *
 * Prints the path at which the loader found the library. With a function, cuInit most likely,
 * calls it with the one argument 0 and prints the number it returns on a second line.
 *
 *   0  found, and called
 *   2  called wrongly
 *   3  not found, or found and not loaded; the loader's reason is on standard error
 *   4  it has no such function
 *
 * With glibc it is linked to the oldest versions of what it uses, because a program of this
 * machine's glibc does not start in older userlands. That takes its own entry: the usual one
 * calls a __libc_start_main that glibc has since 2.34. Link it so:
 *
 *   cc -nostartfiles -o probe probe.c -Wl,--no-as-needed -l:libdl.so.2
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

#ifdef __GLIBC__
__asm__(".symver __libc_start_main,__libc_start_main@GLIBC_2.2.5\n"
	".symver dlopen,dlopen@GLIBC_2.2.5\n"
	".symver dlsym,dlsym@GLIBC_2.2.5\n"
	".symver dlerror,dlerror@GLIBC_2.2.5\n"
	".symver dlinfo,dlinfo@GLIBC_2.3.3\n"
	".globl _start\n"
	"_start:\n"
	"	xor %ebp, %ebp\n"
	"	mov %rdx, %r9\n"           /* what the loader has us do at the end */
	"	pop %rsi\n"                /* argc */
	"	mov %rsp, %rdx\n"          /* argv */
	"	and $-16, %rsp\n"
	"	push %rax\n"
	"	push %rsp\n"               /* the stack's end */
	"	xor %r8d, %r8d\n"          /* no fini, and no init: there are no constructors */
	"	xor %ecx, %ecx\n"
	"	lea main(%rip), %rdi\n"
	"	call __libc_start_main@PLT\n"
	"	hlt\n");
#endif

int main(int argc, char **argv)
{
	struct link_map *map;
	int (*function)(unsigned);
	void *library;

	if (argc != 2 && argc != 3) {
		fprintf(stderr, "usage: probe SONAME [FUNCTION]\n");
		return 2;
	}
	library = dlopen(argv[1], RTLD_NOW);
	if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map)) {
		fprintf(stderr, "%s\n", dlerror());
		return 3;
	}
	puts(map->l_name);
	if (argc == 3) {
		*(void **)&function = dlsym(library, argv[2]);
		if (!function) {
			fprintf(stderr, "%s\n", dlerror());
			return 4;
		}
		printf("%d\n", function(0));
	}
	return 0;
}
