//! Code that must not have a stack frame of its own: the exports that jump to the driver's function, whatever its
//! arguments are, launches that nothing holds back, and the `dlsym` that stands before the C library's. The only file with machine code.

/// Exports `$symbol`, number `$index` of library `$library`: a jump to the driver's function of that name. Two
/// instructions more than calling it directly, once it is resolved.
#[cfg(target_arch = "x86_64")]
macro_rules! forward {
    ($library:ident, $symbol:ident, $index:literal) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $symbol() {
            // r11 belongs to whoever is between a caller and the function called (System V psABI, 3.2.3).
            std::arch::naked_asm!(
                "mov r11, qword ptr [rip + {slots} + 8 * {index}]",
                "test r11, r11",
                "je 2f",
                "jmp r11",
                "2:",
                "mov r11d, {index}",
                "jmp {resolve}",
                slots = sym crate::real::$library::SLOTS,
                index = const $index,
                resolve = sym crate::jump::$library,
            )
        }
    };
}
pub(crate) use forward;

/// First call of an export: finds the driver's function with all arguments kept, and goes there. r11 is the number.
#[cfg(target_arch = "x86_64")]
macro_rules! resolver {
    ($library:ident) => {
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $library() {
            std::arch::naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                // Eight vector registers may carry arguments. The stack is aligned to 16 again here.
                "sub rsp, 128",
                "movups [rsp], xmm0",
                "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4",
                "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6",
                "movups [rsp + 112], xmm7",
                "mov edi, r11d",
                "call {resolve}",
                "mov r11, rax",
                "movups xmm0, [rsp]",
                "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]",
                "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]",
                "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "pop rbp",
                "jmp r11",
                resolve = sym crate::real::$library::resolve,
            )
        }
    };
}
resolver!(cuda);
resolver!(nvml);

/// Exports a launch: while the process may launch at any time, a jump to the driver's function that counts; else, and with
/// every sixty-fourth launch, a jump to `$held`, which has the same arguments. One thread counts for itself, without a
/// locked instruction, which would take longer than all the rest.
#[cfg(target_arch = "x86_64")]
macro_rules! launches {
    ($symbol:ident, $held:path) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol() {
            // r10, r11 and rax belong to whoever is between a caller and a function that is not variadic.
            std::arch::naked_asm!(
                "mov r11, qword ptr [rip + {free}]",
                "mov rax, qword ptr fs:[0]",
                "cmp rax, qword ptr [r11 + {counts_alone}]",
                "jne 2f",
                "mov rax, qword ptr [r11 + {lease}]",
                // Another lease, another answer.
                "mov rax, qword ptr [rax]",
                "cmp rax, qword ptr [r11 + {until}]",
                "jne 3f",
                "mov r11, qword ptr [r11 + {launches_of_one}]",
                "test byte ptr [r11], 63",
                "je 3f",
                "mov rax, qword ptr [rip + {slots} + 8 * {index}]",
                "test rax, rax",
                "je 3f",
                "inc qword ptr [r11]",
                "jmp rax",
                // The same of another thread.
                "2:",
                "mov rax, qword ptr [r11 + {lease}]",
                "test rax, rax",
                "je 3f",
                "mov rax, qword ptr [rax]",
                "cmp rax, qword ptr [r11 + {until}]",
                "jne 3f",
                "mov r11, qword ptr [r11 + {launches}]",
                "test byte ptr [r11], 63",
                "je 3f",
                "mov rax, qword ptr [rip + {slots} + 8 * {index}]",
                "test rax, rax",
                "je 3f",
                "lock inc qword ptr [r11]",
                "jmp rax",
                "3:",
                "jmp {held}",
                free = sym crate::pace::FREE,
                counts_alone = const std::mem::offset_of!(crate::pace::Free, counts_alone),
                lease = const std::mem::offset_of!(crate::pace::Free, lease),
                until = const std::mem::offset_of!(crate::pace::Free, until),
                launches = const std::mem::offset_of!(crate::pace::Free, launches),
                launches_of_one = const std::mem::offset_of!(crate::pace::Free, launches_of_one),
                slots = sym crate::real::cuda::SLOTS,
                index = const crate::real::cuda::index::$symbol,
                held = sym $held,
            )
        }
    };
}
pub(crate) use launches;

/// A number of the calling thread that no other living thread of the process has; never 0: its thread pointer, whose first
/// word points to itself (ELF TLS, variant II).
#[cfg(target_arch = "x86_64")]
pub(crate) fn thread() -> u64 {
    let pointer;
    // SAFETY: every thread has one.
    unsafe {
        std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(pure, readonly, nostack, preserves_flags));
    }
    pointer
}

/// `void *dlsym(void *handle, const char *symbol)`. RTLD_NEXT and RTLD_DEFAULT mean something else for every caller,
/// so where the answer is the C library's, it must be asked by a jump and not by a call.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym() {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        // The caller's address.
        "mov rdx, [rsp + 24]",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        // Not ours to answer: rdx is the handle to ask.
        "mov rdi, rdx",
        "mov rax, [rip + {real}]",
        "jmp rax",
        "2:",
        "ret",
        answer = sym crate::door::answer_dlsym,
        real = sym crate::libc_door::DLSYM,
    )
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the jumps are only written for x86-64 so far");
