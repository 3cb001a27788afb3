"""An engine that obeys the microserving verbs with modelled time. `python -m engines.emulated` runs one.

Pure, under whatever clock the caller keeps:

| module | what |
|---|---|
| `profile` | latency model, memory and scheduler defaults of one kind of engine; the data is in `profiles/` |
| `kernel` | the scheduler's face: what it is asked and what each pass yields; behind it `scheduler`, `sequences`, |
| | `reservations`, `pool`, `radix`, `events` |
| `link` | a network link that transfers share |
| `language`, `stops`, `logprobs` | the emulated model: what it says, where it stops; its tokenizer is in `tokenizer/` |
| `openai`, `answers` | OpenAI bodies in, OpenAI bytes out |

On the wall clock, with sockets:

| module | what |
|---|---|
| `driver` | runs the kernel's passes |
| `engine` | the verbs as methods; wires all of the above |
| `choice`, `generation`, `streams` | one request: its choices, their life, where their text goes |
| `kv_address`, `kv_wire`, `kv_sender`, `kv_receiver`, `shared_link` | KV transfers between engines |
| `generation_response`, `server` | routes, the streaming response, metrics |
| `settings`, `process`, `__main__` | one engine as a process |
"""
