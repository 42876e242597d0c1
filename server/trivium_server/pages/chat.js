// The chat: streams an answer, shows what its own clock says, keeps nothing once the page is gone.
import { call, find, make, time } from "./common.js";

// The events of a stream, one after another.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

export class Chat {
  // model(): the name to ask for. refused(error): the key is wanted.
  constructor(model, refused) {
    Object.assign(this, { model, refused, said: [], running: null });
    [this.log, this.form, this.field, this.send, this.clear] = ["log", "chat-form", "prompt", "send", "clear"].map(find);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.ask(this.field.value.trim());
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.ask(this.field.value.trim());
    });
    this.clear.addEventListener("click", () => {
      if (this.running) this.running.abort();
      this.said = [];
      this.log.replaceChildren(make("p", { classes: "empty" }, this.log.dataset.empty));
    });
  }

  show(classes, text = "") {
    this.log.querySelector(".empty")?.remove();
    const one = make("div", { classes }, text);
    this.log.append(one);
    this.log.scrollTop = this.log.scrollHeight;
    return one;
  }

  busy(on) {
    this.running = on ? new AbortController() : null;
    this.send.textContent = on ? "Stop" : "Send";
    this.log.setAttribute("aria-busy", String(Boolean(on)));
  }

  async ask(text) {
    if (!text) return;
    this.field.value = "";
    this.show("said mine", text);
    this.said.push({ role: "user", content: text });
    this.busy(true);
    const parts = { reasoning: null, content: null };
    let answer = "";
    try {
      const body = { model: this.model(), messages: this.said, stream: true, include_metrics: true, stream_options: { include_usage: true } };
      const headers = { "content-type": "application/json" };
      const options = { method: "POST", body: JSON.stringify(body), headers, signal: this.running.signal };
      for await (const event of events(await call("v1/chat/completions", options))) {
        if (event.error) throw new Error(event.error.message);
        const delta = event.choices[0]?.delta ?? {};
        for (const name of ["reasoning", "content"]) if (delta[name]) this.grow(parts, name, delta[name]);
        answer += delta.content ?? "";
        if (event.metrics) this.figures(event);
      }
    } catch (error) {
      if (error.name === "AbortError") this.show("figures", "stopped");
      else this.fail(error);
    } finally {
      if (answer) this.said.push({ role: "assistant", content: answer });
      else this.said.pop();
      this.busy(false);
    }
  }

  grow(parts, name, text) {
    parts[name] ??= this.show(name === "content" ? "said theirs" : "said theirs thought");
    parts[name].append(text);
    this.log.scrollTop = this.log.scrollHeight;
  }

  figures({ metrics, usage }) {
    const made = `${usage.completion_tokens} tokens`;
    const first = `first after ${time((metrics.time_to_first_token_ms ?? 0) / 1e3)}`;
    const rate = metrics.tokens_per_second ? `then ${metrics.tokens_per_second.toFixed(1)} tokens/s` : "";
    const line = this.show("figures", [made, first, rate].filter(Boolean).join(" · "));
    line.title = "tokens/s: the tokens after the first, by the time from the first to the last";
  }

  fail(error) {
    this.show("said theirs wrong", error.message);
    if (error.status === 401) this.refused(error);
  }
}
