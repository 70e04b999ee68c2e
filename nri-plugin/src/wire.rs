//! The NRI's messages, generated from `proto/nri.proto`, and what we ask to be told.

#[expect(clippy::cast_possible_truncation, clippy::unwrap_used, reason = "generated")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/mod.rs"));
}

pub use generated::{nri::*, nri_ttrpc::*};

/// The events that we subscribe to, bit n - 1 for event n. Said explicitly: 0 would mean all, among them events that
/// stall the runtime for our answer, and a bit that an older runtime does not know ends the registration.
pub const EVENTS: i32 = bit(Event::STOP_POD_SANDBOX)
    | bit(Event::REMOVE_POD_SANDBOX)
    | bit(Event::CREATE_CONTAINER)
    | bit(Event::STOP_CONTAINER)
    | bit(Event::REMOVE_CONTAINER);

/// What a session subscribes to that only wants the runtime's list: something, since nothing would mean everything,
/// and the event that comes least often.
pub const LIST_ONLY: i32 = bit(Event::POST_UPDATE_CONTAINER);

const fn bit(event: Event) -> i32 {
    1 << (event as i32 - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_those_of_the_oldest_runtime_we_serve() {
        assert_eq!(EVENTS, 0b110_0000_1110);
        assert_eq!(EVENTS >> 11, 0, "NRI 0.6 knows eleven events");
    }
}
