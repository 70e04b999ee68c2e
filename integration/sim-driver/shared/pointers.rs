//! What crosses the border of a C library: pointers that the caller passes, and the macro that makes exported functions of
//! ordinary ones. Both simulated libraries have this file as a module; `crate::ffi` tells it their status codes.

use std::ffi::{CStr, c_char, c_int};

use crate::ffi::{Error, INVALID_VALUE};

/// How every call ends.
pub(crate) type Outcome<T = ()> = Result<T, Error>;

/// Status code of an outcome.
pub(crate) fn status(outcome: Outcome) -> c_int {
    outcome.err().map_or(0, |error| error.0)
}

/// Makes the library's exported functions. `fn name, other_name(argument: Type, …) { … }` makes one function a name, with
/// the same arguments and body; the body is an `Outcome`, and sees as `PER_THREAD` whether its name is that of an
/// entry for the per-thread default stream.
macro_rules! api {
    ($($(#[$doc:meta])* fn $($name:ident),+ ($($arguments:tt)*) $body:block)*) => {
        $($crate::pointers::api_names! { [$($name),+] ($($arguments)*) $body })*
    };
}
macro_rules! api_names {
    ([$($name:ident),+] $arguments:tt $body:tt) => {
        $($crate::pointers::api_one! { $name $arguments $body })+
    };
}
macro_rules! api_one {
    ($name:ident ($($argument:ident: $type:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            const PER_THREAD: bool = $crate::pointers::is_per_thread(stringify!($name));
            let _ = PER_THREAD;
            // A closure, so that `?` ends the body and not this function.
            let body = || -> $crate::pointers::Outcome { $body };
            $crate::pointers::status(body())
        }
    };
}
pub(crate) use {api, api_names, api_one};

/// Whether an entry's name ends as those for the per-thread default stream do.
pub(crate) const fn is_per_thread(name: &str) -> bool {
    let name = name.as_bytes();
    let [.., b'_', b'p', b't', b'd' | b's', b'z' | b's'] = name else { return false };
    true
}

/// Where the caller wants a result; null where it wants none.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes a result that must be wanted.
    pub(crate) fn put(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the library's caller passes null or a pointer to a place for the result.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes a result if it is wanted.
    #[allow(dead_code, reason = "one of the two libraries has no use for it")]
    pub(crate) fn put_if_wanted(self, value: T) {
        if !self.is_null() {
            let _ = self.put(value);
        }
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// An error where no result is wanted: callers check this before they do anything.
    pub(crate) fn wanted(self) -> Outcome<Self> {
        if self.is_null() { Err(INVALID_VALUE) } else { Ok(self) }
    }

    /// Writes as the element at `index` of an array.
    pub(crate) fn put_at(self, index: usize, value: T) -> Outcome {
        self.wanted()?;
        // SAFETY: the caller says that the array is as long as the bounds that were checked by it.
        Self(unsafe { self.0.add(index) }).put(value)
    }

    /// The element at `index` of the array here, by itself.
    #[allow(dead_code, reason = "one of the two libraries has no use for it")]
    pub(crate) fn within(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }

    /// A place for another type, as far as the caller means the same address.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Reads what is there.
    pub(crate) fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

/// What the caller passes by pointer; null where it passes nothing.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// Reads it; it must be there.
    pub(crate) fn get(self) -> Outcome<T> {
        self.get_at(0)
    }

    /// Reads the element at `index` of an array.
    pub(crate) fn get_at(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the library's caller passes null or a pointer to what it means, and says how long an array is.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// The address.
    pub(crate) fn address(self) -> u64 {
        self.0 as u64
    }
}

/// A text that the caller passes.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// A text within a structure that the caller passes, by its address.
    #[allow(dead_code, reason = "one of the two libraries has no such structure")]
    pub(crate) fn at(address: u64) -> Self {
        Self(address as *const c_char)
    }

    /// Its bytes; it must be there.
    pub(crate) fn bytes<'a>(self) -> Outcome<&'a [u8]> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the library's caller passes null or a C string, which lives at least as long as the call.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }
}

/// Writes a text and its end into the caller's place of `length` bytes, cut off if need be.
pub(crate) fn put_text(to: Out<u8>, length: c_int, text: &[u8]) -> Outcome {
    let room = usize::try_from(length).ok().filter(|room| *room > 0).ok_or(INVALID_VALUE)?;
    let text = &text[..text.len().min(room - 1)];
    for (at, byte) in text.iter().chain(&[0]).enumerate() {
        to.put_at(at, *byte)?;
    }
    Ok(())
}
