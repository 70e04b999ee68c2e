//! Waiting. It changes nothing for the application; but the driver takes the occasion to give pools' unused memory back,
//! and so do we.

use std::sync::atomic::Ordering::Relaxed;

use crate::{
    cuda::{
        graph, pool,
        types::{Context, Result, Stream},
    },
    real::driver,
    share::share,
};

fn waited(result: Result) -> Result {
    if let Some(share) = share() {
        if share.state().slack.load(Relaxed) != 0 {
            pool::settle(share);
        }
        graph::settle(share);
    }
    result
}

macro_rules! waits {
    ($($symbol:ident($($argument:ident: $type:ty)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol($($argument: $type)?) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            waited(unsafe { driver!(cuda::$symbol($($argument => $type)?)) })
        }
    )* };
}
waits! {
    cuCtxSynchronize();
    cuCtxSynchronize_v2(context: Context);
    cuStreamSynchronize(stream: Stream);
    cuStreamSynchronize_ptsz(stream: Stream);
    cuEventSynchronize(event: u64);
}
