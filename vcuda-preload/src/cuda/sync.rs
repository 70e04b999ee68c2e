//! Waiting. It changes nothing for the application; but the driver takes the occasion to give pools' unused memory back,
//! and so do we. What has been waited for has ended, which pacing counts.

use std::sync::atomic::Ordering::Relaxed;

use crate::{
    cuda::{
        binding, current_context, graph, pool,
        stream::{self, End},
        types::{CUDA_SUCCESS, Context, Result, Stream},
    },
    pace::{self, In},
    real::driver,
    share::share,
};

fn waited(result: Result) -> Result {
    pace::after_waiting();
    if let Some(share) = share() {
        if share.state().slack.load(Relaxed) != 0 {
            pool::settle(share);
        }
        graph::settle(share);
        binding::settle(share);
    }
    result
}

macro_rules! waits {
    ($($symbol:ident($($argument:ident: $type:ty)?) for $stream:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol($($argument: $type)?) -> Result {
            pace::before_waiting($stream);
            // SAFETY: the arguments are the application's, for the driver to judge.
            waited(unsafe { driver!(cuda::$symbol($($argument => $type)?)) })
        }
    )* };
}
waits! {
    cuStreamSynchronize(stream: Stream) for Some(In::legacy(stream));
    cuStreamSynchronize_ptsz(stream: Stream) for Some(In::per_thread(stream));
    cuEventSynchronize(event: u64) for None;
}

/// Waits for all that is in a context.
fn wait_for_all_in(context: Context, call: impl FnOnce() -> Result) -> Result {
    pace::before_waiting(None);
    let share = share();
    share.inspect(|share| binding::begin_end(share, context));
    let result = call();
    let how = if result == CUDA_SUCCESS { End::Done } else { End::Not };
    share.inspect(|share| binding::end(share, context, how));
    waited(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSynchronize() -> Result {
    // SAFETY: there are no arguments.
    wait_for_all_in(current_context().unwrap_or(0), || unsafe { driver!(cuda::cuCtxSynchronize()) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSynchronize_v2(context: Context) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    wait_for_all_in(context, || unsafe { driver!(cuda::cuCtxSynchronize_v2(context => Context)) })
}

macro_rules! destroys_stream {
    ($($symbol:ident),*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(stream: Stream) -> Result {
            pace::forget_stream(stream);
            pool::forget_stream(stream);
            binding::forget_stream(stream);
            graph::forget_stream(stream);
            // With it ends what is captured there.
            let _captured = stream::end_capture();
            // SAFETY: the argument is the application's, for the driver to judge.
            unsafe { driver!(cuda::$symbol(stream => Stream)) }
        }
    )* };
}
destroys_stream!(cuStreamDestroy, cuStreamDestroy_v2);
